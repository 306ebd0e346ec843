"""The figures of a study, one file each. A file that is put here is found; nothing else lists them."""
