"""The plan: claims resolved to where every tensor lives and what a step sends."""
