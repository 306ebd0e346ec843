"""The figures of a study, one file each. Every file in this folder is imported and so registers its figure; no other
list names the files."""
