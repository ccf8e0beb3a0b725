"""The command line: arguments, commands, rendering."""
