"""Decoding one token after another."""
