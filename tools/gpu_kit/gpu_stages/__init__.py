"""The stages of `gpu_check.py`: `cases` of each module is what there is to do."""
