"""Reports: values in, text out."""
