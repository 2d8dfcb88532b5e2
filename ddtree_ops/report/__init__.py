"""One result model, rendered for a terminal, a log file or a program."""
