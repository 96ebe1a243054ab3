"""A static run, analysed as a recording is."""
