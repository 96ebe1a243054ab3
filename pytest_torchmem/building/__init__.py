"""Building: our C++ is compiled once, where it is first needed, into a cache."""
