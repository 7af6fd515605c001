"""The controller: one actor that carries out what operators wish."""
