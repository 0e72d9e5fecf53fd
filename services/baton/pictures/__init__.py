"""Pictures that clients send: taken out of data URIs, decoded and resized in processes of their own, which
have limits on memory and time. Pillow decodes (`pip install baton-serve[images]`)."""
