"""The program that runs on every VM: it starts ranks, passes on what they say and print, and ends them."""
