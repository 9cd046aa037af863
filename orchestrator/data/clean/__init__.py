"""Cleaning: a declared list of steps decides which documents are kept, and what of their text.

A pass decides part by part until a step compares all documents. Only decisions are stored (see `decisions`); the text
is read again when it is tokenised.
"""
