"""Options, ini settings and markers: read, checked, turned into values."""
