"""A worker of several ranks: processes that each hold a shard of the model and of the KV pool. Rank 0
schedules and sends each step's plan; the others, its followers, execute the same plans."""
