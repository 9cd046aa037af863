"""The commands: arguments in, exit codes and text or JSON out. Nothing is decided here."""
