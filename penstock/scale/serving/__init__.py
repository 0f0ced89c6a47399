"""What the processes of a Ray Serve application run: the ingress, engine replicas, and how they meet."""
