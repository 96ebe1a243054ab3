"""Everything that is put into torch or Python while a body runs."""
