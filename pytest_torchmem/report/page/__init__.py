"""The page in HTML, and the pictures on it."""
