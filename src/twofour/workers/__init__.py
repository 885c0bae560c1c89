"""Native libraries in processes of their own: the process, who asks it, what it can do."""
