"""The HTTP routes, grouped by who calls them. Each only converts between HTTP and the service."""
