"""Figures and the one HTML file that tells what a run measured."""
