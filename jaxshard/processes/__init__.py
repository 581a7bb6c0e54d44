"""What several processes of a run do together: start, find who is missing, agree."""
