"""Write the tables of docs/patches.md."""
