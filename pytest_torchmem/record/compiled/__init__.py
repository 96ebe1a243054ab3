"""From generated code to the lines that the user wrote."""
