from tide_lm.cli import main

main()
