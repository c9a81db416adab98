"""Models as they lie on disk, read into one form whatever the file."""
