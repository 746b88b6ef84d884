"""Runs over several hosts: how processes find each other, agree, and end together."""
