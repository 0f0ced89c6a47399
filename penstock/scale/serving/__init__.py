"""The processes of a Ray Serve application: the ingress, engine replicas, and request routing."""
