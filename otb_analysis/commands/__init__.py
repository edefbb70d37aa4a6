"""The commands of `otb`: what each reads from the command line, what it calls, what it prints."""
