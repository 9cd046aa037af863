"""Encoding of text to token ids: a reference engine, and faster engines that are used while they give the same ids."""
