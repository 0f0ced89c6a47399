"""Several machines with Ray: servers on Ray Serve, jobs on Ray Data. Requires the extra `scale`."""
