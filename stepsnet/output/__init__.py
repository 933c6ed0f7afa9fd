"""What people see: progress, tables, means with their spread, and commands without this machine's paths."""
