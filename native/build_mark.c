/* Says which sources a library was built from; scripts/build_native.py looks for it in the file, and who loads operators
 * compares the last part, of the sources alone, with those that are there. */
const char baton_build_mark[] = "baton-build:" BATON_DIGEST;
