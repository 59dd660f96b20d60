"""What a run, or several in a row, achieved: collected from the gateway, shown as text, JSON and a curve."""
