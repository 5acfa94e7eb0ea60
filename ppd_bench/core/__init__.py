"""Frozen types and the error tree that every room shares. Knows no files, no HTTP and no numpy."""
