"""What `baton bench` measures with: workloads and their arrival times, client processes that ask and note
when tokens came, figures and pictures made of that, and the engine measured inside this process. Nothing here
knows the command line; workloads, records and figures know no gRPC and no torch either."""
