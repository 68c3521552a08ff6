"""From finished runs to figures, tables and the report; imports no torch."""
