"""A schedule becomes something that MXNet runs."""
