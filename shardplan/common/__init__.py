"""Helpers that every package uses: atomic files, entries of files, text tables, progress, quiet imports."""
