"""Cached pages between workers: a worker whose prompt begins as one of another's did pulls the pages of that
beginning (`borrower`) out of the other's prefix tree (`lender`) into its own, before the prompt is admitted.
`shell` is what a worker does with the messages."""
