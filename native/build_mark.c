/* Says which sources a library was built from; scripts/build_native.py looks for it in the file. */
const char baton_build_mark[] = "baton-build:" BATON_DIGEST;
