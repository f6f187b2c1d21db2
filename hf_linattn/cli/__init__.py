"""What every command shares: arguments, exit status, files, jobs side by side."""
