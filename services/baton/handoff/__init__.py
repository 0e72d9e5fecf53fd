"""Pages from one worker to another: `lease` is what a worker lends, `fetch` what it borrows, and they
exchange plain `messages`. Any worker can have either; the roles in worker/ know what the pages are for. Pure:
the shells of the workers send the messages."""
