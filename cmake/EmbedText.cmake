# cmake -D FROM=FILE -D TO=FILE -P EmbedText.cmake: a text as a C++ literal, for #include where a value may stand.
file(READ ${FROM} text)
file(WRITE ${TO} "R\"~~~(${text})~~~\"\n")
