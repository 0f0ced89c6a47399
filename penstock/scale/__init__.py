"""More than one machine, with Ray: Serve runs servers, Data runs jobs. Needs the extra `scale`."""
