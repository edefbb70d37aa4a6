"""The studies, one folder each, and in `lib` what they share."""
