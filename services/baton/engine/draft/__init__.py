"""Drafters: guesses of the tokens that follow a sequence, which one step then verifies."""
