"""Recurrences: their protocol, the engine, schedules, and shared arithmetic."""
