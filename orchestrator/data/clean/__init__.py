"""Cleaning: which documents of the sources are kept, and what of their text, by a declared list of steps.

Steps before one that compares all documents are decided part by part; decisions alone are stored (`decisions`), and the
text is read again when it is tokenised.
"""
