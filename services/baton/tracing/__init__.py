"""What happened to each request: a recorder in every process, and timelines made from their events. Pure:
knows neither gRPC nor the engine."""
