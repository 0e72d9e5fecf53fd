"""What a worker does about images: `spans` checks what starts say of them, `contents` has their pixels or
embeddings fetched while requests need them."""
