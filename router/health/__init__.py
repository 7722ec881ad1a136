"""Workers that fail, requests that kill engines, and what the router concludes."""
