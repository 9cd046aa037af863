"""Folders that others read besides whole models: DCP, adapters for peft, tables with fewer rows."""
