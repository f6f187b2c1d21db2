"""Write docs/patches/: a page for each group of patches, from docstrings and measurements."""
